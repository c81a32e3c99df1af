package main

import (
	"os"
	"os/signal"
	"syscall"
)

// outlive keeps this process alive after the first signal, to report what it has measured: package testbed stops the
// servers at a signal and then sends it again. The signal after that kills. A process that is not interrupted calls
// done.
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
