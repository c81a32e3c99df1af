//go:build race

package explore_test

// The race detector has goroutines run in random order.
func init() { ordered = false }
