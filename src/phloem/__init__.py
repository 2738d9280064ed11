"""phloem: an asyncio actor runtime that caches prompt prefixes of hybrid language models."""
