"""What several processes agree on: sums over the shards of a mesh."""
