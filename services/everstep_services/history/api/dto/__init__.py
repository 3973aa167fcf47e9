"""The shapes of REST's answers and request bodies. Only the endpoints use them."""
