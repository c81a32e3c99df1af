package zklock

// Age is for tests.
var Age = age
