"""What a user of phloem imports."""
