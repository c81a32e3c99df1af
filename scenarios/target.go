package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// target is what the ledgers of a run are in, as the controller sees it.
type target interface {
	// name is what histories call it.
	name() string
	// begin makes it ready for ledgers of these keys.
	begin(ctx context.Context, keys []string) error
	// url is where a worker finds it, which goes through the link if that isn't nil.
	url(link linked) (string, error)
	// hostPort is what a link leads to.
	hostPort() string
	// sync tells the decisions that it has made until now. told is a worker's report, or nil: a decision comes before the
	// report that tells of it.
	sync(ctx context.Context, told *history.Event) error
	kill(ctx context.Context) error
	restart(ctx context.Context) error
	// final returns what is there at the end, and how many calls have been refused since it was started last.
	final(ctx context.Context) (ledgers map[string]resource.Record, refused int, err error)
	// end lets it end by itself, after which it has nothing more to tell.
	end(ctx context.Context) error
	// close ends all that is left of it.
	close() error
}

// unsupported is an error of a child's that matches [errors.ErrUnsupported].
type unsupported string

func (e unsupported) Error() string { return string(e) }

func (unsupported) Is(target error) bool { return target == errors.ErrUnsupported }

// linked is a [*faults.Link].
type linked interface{ Addr() string }

// httpResource is a process that serves a durable resource over HTTP, and tells its decisions itself.
type httpResource struct {
	fencing history.Fencing
	dir     string // of its data
	own     *Store // not nil: the user's, which it opens there
	tell    func(history.Event)

	listener *net.TCPListener
	process  *process // nil while it is dead
	syncs    int
	keys     []string
}

func newHTTPResource(f history.Fencing, dir string, own *Store, tell func(history.Event)) *httpResource {
	return &httpResource{fencing: f, dir: dir, own: own, tell: tell}
}

func (h *httpResource) name() string {
	if h.own != nil {
		return h.own.name()
	}
	return "bolt"
}

// begin listens, too. The listener belongs to us and not to the resource's process, so that the address stays the
// resource's when the process is killed; who connects meanwhile waits for its successor.
func (h *httpResource) begin(ctx context.Context, keys []string) error {
	h.keys = keys
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	h.listener = l.(*net.TCPListener)
	if err := h.restart(ctx); err != nil || h.own == nil {
		return err
	}
	return h.sync(ctx, nil) // of the user's store it isn't known whether it opens
}

func (h *httpResource) hostPort() string { return h.listener.Addr().String() }

func (h *httpResource) url(link linked) (string, error) {
	if link != nil {
		return "http://" + link.Addr(), nil
	}
	return "http://" + h.hostPort(), nil
}

func (h *httpResource) restart(context.Context) error {
	f, err := h.listener.File()
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // the child has its own
	spec := childSpec{Name: Resource, Fencing: h.fencing, Dir: h.dir}
	if h.own != nil {
		spec.Own = h.own.Name
	}
	h.process, err = start(spec, f)
	return err
}

// sync asks the resource's process for its decisions. Workers and the resource report to us side by side; this puts what the
// resource decided before what a worker tells of it.
func (h *httpResource) sync(ctx context.Context, _ *history.Event) error {
	if h.process == nil {
		return nil
	}
	h.syncs++
	if err := h.process.tell(ctx, fmt.Sprintf("sync %d", h.syncs)); err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	for {
		m, err := h.process.next(ctx)
		if err != nil {
			return fmt.Errorf("resource: %w", err)
		}
		switch {
		case m.Unsupported:
			return unsupported("resource: " + m.Error)
		case m.Error != "":
			return fmt.Errorf("resource: %s", m.Error)
		case m.Synced == h.syncs:
			return nil
		}
		h.decided(m)
	}
}

func (h *httpResource) decided(m message) {
	if m.Event != nil {
		h.tell(*m.Event)
	}
}

// kill tells the last decisions of the process, too.
func (h *httpResource) kill(ctx context.Context) error {
	if err := h.process.kill(ctx); err != nil {
		return err
	}
	err := h.process.Kill() // reaps it
	for m := range h.process.messages {
		h.decided(m)
	}
	h.process.close()
	h.process = nil
	return err
}

// final reads the ledgers by reads of ours that are no part of the history: their decisions aren't told.
func (h *httpResource) final(ctx context.Context) (ledgers map[string]resource.Record, refused int, err error) {
	url, _ := h.url(nil)
	client, err := resource.NewClient(url, nil)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	if refused, err = refusals(ctx, url+"/metrics"); err != nil {
		return nil, 0, err
	}
	ledgers = map[string]resource.Record{}
	for _, key := range h.keys {
		rec, err := client.Read(ctx, key)
		if err != nil && !errors.Is(err, resource.ErrNotFound) {
			return nil, 0, err
		}
		ledgers[key] = rec
	}
	return ledgers, refused, nil
}

func (h *httpResource) end(ctx context.Context) error {
	if err := h.process.exit(ctx); err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	return nil
}

func (h *httpResource) close() error {
	var errs []error
	if h.process != nil {
		errs = append(errs, h.process.end())
	}
	if h.listener != nil {
		errs = append(errs, h.listener.Close())
	}
	return errors.Join(errs...)
}
