"""REST under `/api/v1`: a read-only view of the tables, a live stream, and the tokens for both."""
