"""Tasks: one file each, a LightningModule and its DataModule. ``recipe.py`` is what they share."""
