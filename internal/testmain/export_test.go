package testmain

// Patience is how long goroutines get to end.
var Patience = &patience
