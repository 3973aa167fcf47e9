"""NATS reduced to what Everstep uses: beats, facts, questions, documents, leases, blobs."""
