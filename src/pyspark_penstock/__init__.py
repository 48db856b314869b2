"""Makes spark.read.format("penstock") work."""
