"""An incident as one file for people who have no access to the record."""
