package leak

// Patience is how long goroutines get to end.
var Patience = &patience
