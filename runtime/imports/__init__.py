"""What processes of corun's own leave out while they import torch and transformers.

Half of that time goes into things no engine uses. Nothing here changes what a module that is used
does, and nothing is done in processes that are somebody else's.
"""
