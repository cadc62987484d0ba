"""Files and text from untrusted sources: bounded reads, atomic writes, and escaped output."""
