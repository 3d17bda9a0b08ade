"""Tables, figures and summaries: reads run directories, imports no torch."""
