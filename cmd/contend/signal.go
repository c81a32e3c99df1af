package main

import (
	"os"
	"os/signal"
	"syscall"
)

// outlive has this process live on after the signal that interrupts it, to tell what it has measured: package testbed ends the
// servers at a signal and then sends it again, which would kill. The one after that does. A process that is not interrupted
// calls the function that it returns; one that is may not be done with the signal yet when it closes its servers.
func outlive() (done func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	over := make(chan struct{})
	go func() {
		defer signal.Stop(signals)
		select {
		case <-signals:
			<-signals
		case <-over:
		}
	}()
	return func() { close(over) }
}
