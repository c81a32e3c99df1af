// Package bench measures locks: runs of load, and experiments made of them.
package bench

import (
	"context"
	"fmt"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// Job is a run.
type Job struct {
	Config load.Config
	Addrs  []string
	Server string
}

// Check returns an error if this machine can't run c. [load.Config.Check] ignores the machine, so that other machines' records
// can be read.
func Check(c load.Config) error {
	if n := runtime.NumCPU(); c.Processors > n {
		return fmt.Errorf("-processors %d; there are %d here, and 0 is all of them", c.Processors, n)
	}
	return c.Check()
}

// Run runs j. Result and error are as of [load.Run].
func (j Job) Run(ctx context.Context, reg prometheus.Registerer, onSample func(load.Sample)) (*load.Result, error) {
	c := j.Config
	if c.Processors > 0 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(c.Processors))
	}
	spec := Spec{Lock: c.Backend, Addrs: j.Addrs, TTL: c.TTL.D(), Registerer: reg}
	if c.Delay > 0 {
		wires, err := load.NewWires(c.Delay.D())
		if err != nil {
			return nil, err
		}
		defer wires.Close()
		spec.Dial = wires.Dial
	}
	open := func(ctx context.Context) (load.Lock, error) { return Open(ctx, spec) }
	res, err := load.Run(ctx, c, open, load.Options{Registerer: reg, OnSample: onSample})
	if res != nil {
		res.Machine.Server, res.Machine.Library = j.Server, library(c.Backend)
		if c.Backend == ping { // its clients lock nothing
			res.Checks = load.Checks{}
		}
	}
	return res, err
}
