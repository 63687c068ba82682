"""The data pipeline: facts as Spark DataFrames, read from and written to the nodes of zones."""
