"""How each kind of fact changes the tables; a module for each area of facts. Pure."""
