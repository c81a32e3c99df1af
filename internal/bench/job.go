// Package bench measures locks: runs of load, and experiments made of them.
package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/proc"
)

// Job is a run.
type Job struct {
	Config load.Config
	Prefix string // Config's, which isn't in its JSON
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

// Run runs j in this process. Result and error are as of [load.Run].
func (j Job) Run(ctx context.Context, reg prometheus.Registerer, onSample func(load.Sample)) (*load.Result, error) {
	c := j.Config
	c.Prefix = j.Prefix
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

// ChildEnv marks a process that reads a [Job] from standard input and writes its result.
const ChildEnv = "FENCELAB_CONTEND_CHILD"

// Child is the main function of such a process.
func Child(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	var j Job
	if err := json.NewDecoder(stdin).Decode(&j); err != nil {
		return fmt.Errorf("contend: a process of %s=1 is started by contend alone: %w", ChildEnv, err)
	}
	res, err := j.Run(ctx, nil, nil)
	if res == nil {
		return err
	}
	return errors.Join(err, json.NewEncoder(stdout).Encode(res))
}

func (j Job) runAlone(ctx context.Context) (*load.Result, error) {
	b, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("contend: %w", err)
	}
	cmd := exec.Command(self) //nolint:noctx // it is killed below
	cmd.Env = append(os.Environ(), ChildEnv+"=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(b), &stdout, &stderr
	child, err := proc.Start(cmd)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = child.Kill() })()
	if err = child.Wait(); err != nil {
		err = fmt.Errorf("contend: a process of the run failed: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	res := &load.Result{}
	if derr := json.Unmarshal(stdout.Bytes(), res); derr != nil {
		return nil, cmp.Or(context.Cause(ctx), err, derr)
	}
	return res, err
}
