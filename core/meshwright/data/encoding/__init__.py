"""From an example to tokens, and which of them are learnt."""
