"""REST under `/api/v1`: a view of the tables, a live stream, what people ask for, and tokens."""
