"""What goes wrong in a training of the corpus: importing the modules fills the registry."""
