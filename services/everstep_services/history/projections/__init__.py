"""What each kind of fact claims about the tables, a module an area of the catalogue. Pure."""
