"""Pages of docs/results and the figures on them, each a function of the records in results/ and benchmarks/results."""
