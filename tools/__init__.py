"""What the repository needs and the product does not: writers of reference pages, and checks of the house."""
