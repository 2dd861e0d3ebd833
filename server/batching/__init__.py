"""Files and batches over HTTP: kept in one folder, answered behind live traffic, and resumed."""
