package main

import (
	"os"
	"os/signal"
	"syscall"
)

// outlive has this process live on after the signal that interrupts it, until the function that it returns is called, to tell
// what it has measured: package testbed ends the servers at a signal and then sends it again, which would kill. The one
// after that does.
func outlive() (done func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	over := make(chan struct{})
	go func() {
		defer signal.Stop(signals)
		for range 2 {
			select {
			case <-signals:
			case <-over:
				return
			}
		}
	}()
	return func() { close(over) }
}
