"""What compiled blocks bring a split model, and what it takes to compile them."""
