"""One plugin of each mode, to copy from. Not imported: loaded through their manifests."""
