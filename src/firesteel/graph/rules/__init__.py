"""Shape rules and refusals: the tables, how a rule is checked, and what families of operators share.  `ops/` writes the rows."""
