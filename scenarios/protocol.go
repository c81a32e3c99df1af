package scenarios

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/fencelab/fencelab/internal/proc"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Workers and the resource are this binary, started again with a childSpec in the environment. They send messages as JSON lines.
// A worker waits for a line at each checkpoint, the resource for sync requests.

const childEnv = "FENCELAB_SCENARIO_CHILD"

const (
	eventsFile  = 3
	controlFile = 4
	listenFile  = 5 // the resource's listener, which outlives its process
)

type childSpec struct {
	Name    string
	Fencing history.Fencing

	Lock   LockSpec
	Keys   []string // the ledgers; the first is the lock's too
	URL    string   // of the resource; of the store if Direct
	Direct bool
	Store  string // Store.Name, for the resource and for a Direct worker
	Sent   bool
	Worker Worker

	Dir string

	files []*os.File
	env   []string
}

type message struct {
	Event  *history.Event `json:",omitempty"`
	Stops  bool           `json:",omitempty"`
	Synced bool           `json:",omitempty"` // the reply to a sync, after all earlier decisions

	Error       string `json:",omitempty"`
	Unsupported bool   `json:",omitempty"` // Error matches errors.ErrUnsupported
}

var childReady atomic.Bool

// IsChildReady reports whether Child was called.
func IsChildReady() bool { return childReady.Load() }

// Child runs a worker or the resource, and doesn't return, if this process was started as one. Call it first in main or TestMain.
// open opens the lock under test.
func Child(open Open) { ChildWithStore(open, nil) }

// ChildWithStore is [Child] for runs over your own [Store].
func ChildWithStore(open Open, store OpenStore) {
	childReady.Store(true)
	text, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := child(text, open, store); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func child(text string, open Open, store OpenStore) error {
	var spec childSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("scenarios: %s: %w", childEnv, err)
	}
	syscall.CloseOnExec(eventsFile) // processes that the lock starts may outlive this one
	syscall.CloseOnExec(controlFile)
	p := &pipe{out: json.NewEncoder(os.NewFile(eventsFile, "events")), in: bufio.NewScanner(os.NewFile(controlFile, "control"))}
	if spec.Name == Resource {
		return resourceProcess(&spec, p, store)
	}
	return workerProcess(&spec, p, open, store)
}

type pipe struct {
	mu  sync.Mutex
	out *json.Encoder
	in  *bufio.Scanner
}

func (p *pipe) send(m message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Encode(m)
}

var errControllerExited = errors.New("scenarios: the controller has exited")

func (p *pipe) wait() error {
	if !p.in.Scan() {
		return errors.Join(errControllerExited, p.in.Err())
	}
	return nil
}

// report reports e and, if stops, waits for the controller.
func (p *pipe) report(e history.Event, stops bool) error {
	e.Time, e.Kind = time.Now(), history.KindReport
	err := p.send(message{Event: &e, Stops: stops})
	if err == nil && stops {
		err = p.wait()
	}
	return err
}

type process struct {
	*proc.Child
	messages chan message
	control  *os.File
	output   *output
}

// backlog is how many unread messages a child may have sent; ours send a few dozen.
const backlog = 1024

func start(spec childSpec) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	eventsR, eventsW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = eventsW.Close() }()
	controlR, controlW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, eventsR.Close())
	}
	defer func() { _ = controlR.Close() }()

	p := &process{messages: make(chan message, backlog), control: controlW, output: &output{}}
	cmd := exec.Command(exe) //nolint:noctx // ended by close, also when it is stopped
	// By default the race detector delays exit by a second.
	cmd.Env = append(os.Environ(), childEnv+"="+string(text), "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	cmd.Env = append(cmd.Env, spec.env...)
	cmd.Stdout, cmd.Stderr = p.output, p.output
	cmd.ExtraFiles = append([]*os.File{eventsW, controlR}, spec.files...)
	p.Child, err = proc.Start(cmd)
	if err != nil {
		return nil, errors.Join(err, eventsR.Close(), controlW.Close())
	}
	go func() {
		defer close(p.messages)
		defer func() { _ = eventsR.Close() }()
		for dec := json.NewDecoder(eventsR); ; {
			var m message
			if dec.Decode(&m) != nil {
				return
			}
			p.messages <- m
		}
	}()
	return p, nil
}

func (p *process) sendLine(ctx context.Context, line string) error {
	if _, err := fmt.Fprintln(p.control, line); err != nil {
		return cmp.Or(p.exit(ctx), fmt.Errorf("send %q: %w%s", line, err, p.output))
	}
	return nil
}

func (p *process) next(ctx context.Context) (message, error) {
	select {
	case m, ok := <-p.messages:
		if !ok {
			return m, cmp.Or(p.exit(ctx), fmt.Errorf("its process has ended%s", p.output))
		}
		return m, nil
	case <-ctx.Done():
		return message{}, fmt.Errorf("waiting for its next report: %w%s", context.Cause(ctx), p.output)
	}
}

// exit waits for the child to end, and returns its error, such as a data race.
func (p *process) exit(ctx context.Context) error {
	p.close()
	select {
	case <-p.Exited():
	case <-ctx.Done():
		return fmt.Errorf("waiting for it to exit: %w", context.Cause(ctx))
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("its process ended with %w%s", err, p.output)
	}
	return nil
}

func (p *process) end() (last []message, err error) {
	err = p.Kill()
	for m := range p.messages {
		last = append(last, m)
	}
	p.close()
	return last, err
}

func (p *process) close() { _ = p.control.Close() }

type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.buf.Len() == 0 {
		return ""
	}
	return "\n--- output:\n" + o.buf.String()
}
