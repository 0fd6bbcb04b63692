import os

# gRPC's core writes lines like "Got goaway" to the terminal when a peer leaves; our own log tells it in words.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
