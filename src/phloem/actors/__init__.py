"""Everything that receives messages: the domain, the tree, the allocators, the transfer."""
