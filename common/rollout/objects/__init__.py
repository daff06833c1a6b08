"""Content-addressed bytes: stores for the coordinator; a client, a cache, packs and directory trees for its clients."""
