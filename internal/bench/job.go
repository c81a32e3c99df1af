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

	"github.com/fencelab/fencelab/internal/bench/competitors"
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

// Check returns an error if this machine can't run c. [load.Config.Check] ignores the machine, so that records of
// other machines can be read.
func Check(c load.Config) error {
	if n := runtime.NumCPU(); c.Processors > n {
		return fmt.Errorf("-processors %d; there are %d here, and 0 is all of them", c.Processors, n)
	}
	return c.Check()
}

// Open opens a client of a lock. Tests replace it.
var Open = competitors.Open

// Run runs j in this process. Result and error are as of [load.Run].
func (j Job) Run(ctx context.Context, reg prometheus.Registerer, onSample func(load.Sample)) (*load.Result, error) {
	c := j.Config
	c.Prefix = j.Prefix
	if c.Processors > 0 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(c.Processors))
	}
	spec := competitors.Spec{Lock: c.Backend, Addrs: j.Addrs, TTL: c.TTL.D(), Registerer: reg}
	if c.Delay > 0 {
		wires, err := load.NewWires(c.Delay.D())
		if err != nil {
			return nil, err
		}
		defer wires.Close()
		spec.Dial = wires.Dial
	}
	return load.Run(ctx, c, func(ctx context.Context) (load.Lock, error) { return Open(ctx, spec) }, &load.Options{
		Registerer: reg, OnSample: onSample, Server: j.Server, Library: competitors.Library(c.Backend),
		Unlocked: c.Backend == competitors.Ping,
	})
}

// ChildEnv marks a process that reads a [Job] from standard input and writes its result. It cuts its run short when the
// input ends.
const ChildEnv = "FENCELAB_CONTEND_CHILD"

// Child is its main function.
func Child(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	in := json.NewDecoder(stdin)
	var j Job
	if err := in.Decode(&j); err != nil {
		return fmt.Errorf("contend: a process of %s=1 is started by contend alone: %w", ChildEnv, err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() { // ends with the input, at the latest when the process ends
		_, _ = io.Copy(io.Discard, stdin)
		cancel(errors.New("contend: stopped by its parent"))
	}()
	res, err := j.Run(ctx, nil, nil)
	if res == nil {
		return err
	}
	return errors.Join(err, json.NewEncoder(stdout).Encode(res))
}

// runAlone runs j in a child process.
func (j Job) runAlone(ctx context.Context) (*load.Result, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("contend: %w", err)
	}
	b, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self) //nolint:noctx // its input ends it
	cmd.Env = append(os.Environ(), ChildEnv+"=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("contend: %w", err)
	}
	child, err := proc.Start(cmd)
	if err != nil {
		return nil, err
	}
	if _, err := stdin.Write(b); err != nil {
		_ = child.Kill() // if it hasn't failed by itself
	}
	defer context.AfterFunc(ctx, func() { _ = stdin.Close() })()
	if err = child.Wait(); err != nil {
		err = fmt.Errorf("contend: a process of the run failed: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	res := &load.Result{}
	if derr := json.Unmarshal(stdout.Bytes(), res); derr != nil {
		return nil, cmp.Or(err, derr)
	}
	return res, err
}
