"""What finds mistakes before they cost: in the numbers of a split run, in the code, in the environment."""
