import os

# gRPC's core writes lines like "Got goaway" to the terminal when a peer leaves; our own log explains it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
