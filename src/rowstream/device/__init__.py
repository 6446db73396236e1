"""What stands in a torch model where a table stood; this layer and those above import torch."""
