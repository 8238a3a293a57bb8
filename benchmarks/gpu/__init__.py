"""Everything that only a GPU can say of fullframe, in one command of under ten minutes."""
