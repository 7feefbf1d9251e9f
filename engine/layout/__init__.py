"""How the rows of a step are laid out for one forward of the model."""
