"""What each kind of fact changes in the tables, a module for each area of the catalogue. Pure."""
