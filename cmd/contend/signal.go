package main

import (
	"os"
	"os/signal"
	"syscall"
)

// outlive keeps this process alive after the first signal, to report what it has measured: package testbed stops the
// servers at a signal and then sends it again, which would kill. The signal after that kills. A process that is not
// interrupted calls done; one that is may still be handling the signal when it closes its servers.
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
