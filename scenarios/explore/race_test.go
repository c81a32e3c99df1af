//go:build race

package explore_test

// The race detector runs goroutines in random order.
func init() { ordered = false }
