package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/internal/peers"
	"github.com/fencelab/fencelab/internal/proc"
)

// job is a run of one process.
type job struct {
	Config load.Config
	Prefix string // Config's, which isn't in its JSON
	Addrs  []string
	Server string
	start  time.Time // when the load begins, once all are connected; zero: at once
}

// measure runs j in this process, or spread over several. An error beside a result is as that of [load.Run].
func measure(ctx context.Context, j job, reg prometheus.Registerer, onSample func(load.Sample)) (*load.Result, error) {
	if j.Config.Processes > 1 {
		return spread(ctx, j, onSample)
	}
	return j.run(ctx, reg, j.begin, onSample)
}

// begin waits for the start.
func (j job) begin(ctx context.Context) error {
	wait, err := untilStart(j.start, time.Now())
	if err != nil {
		return err
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return context.Cause(ctx) // nil, unless both have come
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (j job) run(ctx context.Context, reg prometheus.Registerer, ready func(context.Context) error, onSample func(load.Sample)) (*load.Result, error) {
	c := j.Config
	c.Prefix = j.Prefix
	if c.Processors > 0 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(c.Processors))
	}
	spec := peers.Spec{Lock: c.Backend, Addrs: j.Addrs, TTL: c.TTL.D(), Registerer: reg}
	if c.Delay > 0 {
		wires, err := load.NewWires(c.Delay.D())
		if err != nil {
			return nil, err
		}
		defer wires.Close()
		spec.Dial = wires.Dial
	}
	open := func(ctx context.Context) (load.Lock, error) { return openLock(ctx, spec) }
	return load.Run(ctx, c, open, &load.Options{
		Registerer: reg, Ready: ready, OnSample: onSample, Server: j.Server, Library: peers.Library(c.Backend), Unlocked: c.Backend == ping,
	})
}

// childEnv tells a process that it is a child. It reads its job from its standard input, a JSON value, says there that it
// is ready, begins at the next line, and ends its run before its time when the input ends: its parent has gone, or wants
// it to.
const childEnv = "FENCELAB_CONTEND_CHILD"

// message is a line of what a child says.
type message struct {
	Ready  bool         `json:",omitempty"`
	Sample *load.Sample `json:",omitempty"`
	Result *load.Result `json:",omitempty"`
}

func child(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	in := bufio.NewReader(stdin)
	line, err := in.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("contend: a process of %s=1 is started by contend alone: %w", childEnv, err)
	}
	var j job
	if err := json.Unmarshal(line, &j); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	begin := make(chan struct{})
	go func() { // ends with the input, which the end of the process closes
		if _, err := in.ReadBytes('\n'); err == nil {
			close(begin)
			_, _ = in.ReadBytes('\n')
		}
		cancel(errors.New("contend: told to stop"))
	}()
	out := json.NewEncoder(stdout)
	var say error
	res, err := j.run(ctx, nil,
		func(ctx context.Context) error {
			if err := out.Encode(message{Ready: true}); err != nil {
				return err
			}
			select {
			case <-begin:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		},
		func(s load.Sample) { say = errors.Join(say, out.Encode(message{Sample: &s})) })
	if res == nil {
		return err
	}
	return errors.Join(err, say, out.Encode(message{Result: res}))
}

// part is what the i-th of n processes does.
func (j job) part(i, n int) job {
	share := func(all int) int { return all/n + min(1, max(0, all%n-i)) }
	p := j
	p.Config.Processes = 1
	p.Config.Contenders, p.Config.Connections = share(j.Config.Contenders), share(j.Config.Connections)
	p.Config.Rate = j.Config.Rate * float64(p.Config.Contenders) / float64(j.Config.Contenders)
	p.Config.Seed = j.Config.Seed + uint64(i) // Poisson processes that are independent add up to one
	return p
}

// spread runs j in processes of its own. None of them outlives it.
func spread(ctx context.Context, j job, onSample func(load.Sample)) (res *load.Result, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("contend: %w", err)
	}
	n := j.Config.Processes
	children := make([]*worker, 0, n)
	defer func() {
		for _, w := range children {
			err = errors.Join(err, w.kill())
		}
	}()
	samples := &merger{emit: onSample, come: make([]int, n)}
	for i := range n {
		w, err := startWorker(self, j.part(i, n), samples.of(i))
		if err != nil {
			return nil, err
		}
		children = append(children, w)
	}
	for _, w := range children {
		select {
		case <-w.ready:
		case <-w.proc.Exited():
			return nil, w.failure()
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	if err := j.begin(ctx); err != nil {
		return nil, err
	}
	for _, w := range children {
		if _, err := io.WriteString(w.stdin, "begin\n"); err != nil {
			return nil, fmt.Errorf("contend: %w", err)
		}
	}
	stop := context.AfterFunc(ctx, func() {
		for _, w := range children {
			_ = w.stdin.Close() // it ends early, and says what it has
		}
	})
	defer stop()
	gone := make(chan *worker, n)
	for _, w := range children {
		go func() {
			<-w.proc.Exited()
			gone <- w
		}()
	}
	var late error // of a process that has said its result; one stands for all
	for range children {
		w := <-gone
		if w.result == nil { // the others would go on to the end for nothing
			return nil, w.failure()
		}
		if w.proc.Wait() != nil {
			late = w.failure()
		}
	}
	var results []*load.Result
	for _, w := range children {
		results = append(results, w.result)
	}
	res, err = load.Merge(results)
	return res, errors.Join(err, late)
}

// worker is a child process.
type worker struct {
	proc   *proc.Child
	stdin  io.WriteCloser
	stderr *limited
	ready  chan struct{}
	result *load.Result // once it has exited
}

func startWorker(self string, j job, onSample func(load.Sample)) (*worker, error) {
	b, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self) //nolint:noctx // proc ends it
	cmd.Env = append(os.Environ(), childEnv+"=1")
	w := &worker{stderr: &limited{left: 4096}, ready: make(chan struct{})}
	cmd.Stderr = w.stderr
	cmd.Stdout = &lines{each: func(line []byte) error {
		var m message
		if err := json.Unmarshal(line, &m); err != nil {
			return err
		}
		switch {
		case m.Ready:
			close(w.ready)
		case m.Sample != nil:
			onSample(*m.Sample)
		case m.Result != nil:
			w.result = m.Result
		}
		return nil
	}}
	if w.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("contend: %w", err)
	}
	if w.proc, err = proc.Start(cmd); err != nil {
		return nil, err
	}
	if _, err := w.stdin.Write(append(b, '\n')); err != nil {
		return nil, errors.Join(fmt.Errorf("contend: %w", err), w.kill())
	}
	return w, nil
}

func (w *worker) kill() error {
	_ = w.stdin.Close() // closed already, if it has exited
	return w.proc.Kill()
}

// failure is what went wrong with a worker that has exited.
func (w *worker) failure() error {
	return fmt.Errorf("contend: a process of the run failed: %w: %s", w.proc.Wait(), strings.TrimSpace(w.stderr.String()))
}

// lines calls each with every line that is written to it.
type lines struct {
	each func(line []byte) error
	rest []byte
}

func (l *lines) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		i := bytes.IndexByte(l.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		if err := l.each(l.rest[:i]); err != nil {
			return 0, err
		}
		l.rest = l.rest[i+1:]
	}
}

// limited keeps the beginning of what is written to it.
type limited struct {
	mu   sync.Mutex
	left int
	text []byte
}

func (l *limited) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b[:min(len(b), l.left)]...)
	l.left -= min(len(b), l.left)
	return len(b), nil
}

func (l *limited) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// merger adds the samples of several processes, the first of each, the second of each and so on: they end when they
// should, but for a process that the machine has held up.
type merger struct {
	emit func(load.Sample)

	mu      sync.Mutex
	come    []int                 // how many have come, by process
	pending map[int]*mergedSample // by number
}

type mergedSample struct {
	load.Sample
	parts int
}

// of returns what takes the samples of the i-th process, which come in order.
func (m *merger) of(i int) func(load.Sample) {
	return func(s load.Sample) { m.add(i, s) }
}

func (m *merger) add(i int, s load.Sample) {
	if m.emit == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pending == nil {
		m.pending = map[int]*mergedSample{}
	}
	at := m.come[i]
	m.come[i]++
	p := m.pending[at]
	if p == nil {
		p = &mergedSample{}
		m.pending[at] = p
	}
	p.parts++
	p.T = max(p.T, s.T)
	p.Sections += s.Sections
	p.Failed += s.Failed
	p.Waiting += s.Waiting
	p.P50, p.P99 = max(p.P50, s.P50), max(p.P99, s.P99)
	if p.parts == len(m.come) {
		delete(m.pending, at)
		m.emit(p.Sample)
	}
}
