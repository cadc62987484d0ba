"""Files and text of users and of others: read within bounds, written completely, and printed escaped."""
