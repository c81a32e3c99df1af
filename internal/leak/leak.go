// Package leak looks for goroutines that tests have left behind.
package leak

import (
	"fmt"
	"os"
	"time"

	"go.uber.org/goleak"
)

// patience is how long goroutines get to end that are about to. goleak itself gives them less than half a second, and a
// thread can stand still for longer than that on a machine with other work.
var patience = time.Minute

// Find returns an error if there are goroutines that don't end.
func Find(options ...goleak.Option) error {
	for began := time.Now(); ; {
		if err := goleak.Find(options...); err == nil || time.Since(began) > patience {
			return err
		}
	}
}

// Main runs the tests of m, a *testing.M, and exits. It is an error if they pass and leave goroutines behind.
func Main(m interface{ Run() int }, options ...goleak.Option) {
	code := m.Run()
	if code == 0 {
		if err := Find(options...); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}
