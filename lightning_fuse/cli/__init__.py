"""The installed commands: ``lightning-fuse train | compare | ledger | convert | import-wandb``."""
