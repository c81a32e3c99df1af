package scenarios

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/observe"
	"github.com/fencelab/fencelab/internal/server"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// target holds the ledgers of a run, for the controller.
type target interface {
	name() string
	begin(ctx context.Context, keys []string) error
	// url is the address for workers, through link if not empty.
	url(link string) string
	hostPort() string
	// sync records new decisions. report is the next event that the worker reported, or nil.
	sync(ctx context.Context, report *history.Event) error
	kill(ctx context.Context) error
	restart(ctx context.Context) error
	// watch calls f, and ends its context if the target ends by itself; that is the error then. Requests would wait for a restart.
	watch(ctx context.Context, f func(context.Context) error) error
	// final returns the refusals since the last start.
	final(ctx context.Context) (ledgers map[string]resource.Record, refused int, err error)
	end(ctx context.Context) error
	close() error
}

type httpResource struct {
	*Store
	fencing history.Fencing
	dir     string
	record  func(history.Event)

	listener *net.TCPListener
	process  *process // nil while it is dead
	keys     []string
}

// begin listens in the controller, so that the address survives a kill; clients then wait for the next process.
func (h *httpResource) begin(ctx context.Context, keys []string) error {
	h.keys = keys
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	h.listener = l.(*net.TCPListener)
	if err := h.restart(ctx); err != nil {
		return err
	}
	return h.sync(ctx, nil)
}

func (h *httpResource) hostPort() string { return h.listener.Addr().String() }

func (h *httpResource) url(link string) string { return "http://" + cmp.Or(link, h.hostPort()) }

func (h *httpResource) restart(context.Context) error {
	f, err := h.listener.File()
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	h.process, err = start(childSpec{Name: Resource, Fencing: h.fencing, Store: h.Name, Dir: h.dir, files: []*os.File{f}})
	return err
}

// sync gets the resource's decisions, to be recorded before workers' reports of them.
func (h *httpResource) sync(ctx context.Context, _ *history.Event) error {
	if h.process == nil {
		return nil
	}
	if err := h.process.sendLine(ctx, "sync"); err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	for {
		m, err := h.process.next(ctx)
		switch {
		case err != nil:
			return fmt.Errorf("resource: %w", err)
		case m.Unsupported:
			return unsupported("resource: " + m.Error)
		case m.Error != "":
			return fmt.Errorf("resource: %s", m.Error)
		case m.Synced:
			return nil
		}
		h.decided(m)
	}
}

// unsupported is a child's error that matches [errors.ErrUnsupported].
type unsupported string

func (e unsupported) Error() string { return string(e) }

func (unsupported) Is(target error) bool { return target == errors.ErrUnsupported }

func (h *httpResource) decided(m message) {
	if m.Event != nil {
		h.record(*m.Event)
	}
}

func (h *httpResource) kill(ctx context.Context) error {
	if err := h.process.With(func(pid int) error { return faults.Kill(ctx, pid) }); err != nil {
		return err
	}
	last, err := h.process.end()
	for _, m := range last {
		h.decided(m)
	}
	h.process = nil
	return err
}

func (h *httpResource) watch(ctx context.Context, f func(context.Context) error) error {
	p := h.process
	if p == nil {
		return f(ctx)
	}
	ctx, end := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() {
		defer end()
		select {
		case <-p.Exited():
			watched <- fmt.Errorf("resource: %w", cmp.Or(p.exit(ctx), errors.New("its process has ended")))
		case <-ctx.Done():
			watched <- nil
		}
	}()
	err := f(ctx)
	end()
	return cmp.Or(<-watched, err)
}

func (h *httpResource) final(ctx context.Context) (ledgers map[string]resource.Record, refused int, err error) {
	url := h.url("")
	if refused, err = refusals(ctx, url+"/metrics"); err != nil {
		return nil, 0, err
	}
	client, err := resource.NewClient(url, nil)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
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

const refusalsMetric = "resource_stale_token_rejections_total"

func refusals(ctx context.Context, url string) (n int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), refusalsMetric+" "); ok {
			return strconv.Atoi(value)
		}
	}
	return 0, errors.Join(fmt.Errorf("%s has no %s", url, refusalsMetric), lines.Err())
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
		_, err := h.process.end()
		errs = append(errs, err)
	}
	if h.listener != nil {
		errs = append(errs, h.listener.Close())
	}
	return errors.Join(errs...)
}

func resourceProcess(spec *childSpec, p *pipe, own OpenStore) error {
	f := os.NewFile(listenFile, "listener")
	listener, err := net.FileListener(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("scenarios: resource: %w", err)
	}
	store, err := resourceStore(context.Background(), spec, own)
	if err != nil {
		err = errors.Join(p.send(message{Error: err.Error(), Unsupported: errors.Is(err, errors.ErrUnsupported)}), listener.Close())
		_ = p.wait() // exiting earlier would break the controller's pipe before it reads the message
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		for {
			if p.wait() != nil || p.send(message{Synced: true}) != nil {
				return
			}
		}
	}()
	store = observe.Store(store, func(d observe.Decision) { // a dead controller ends this process anyway
		_ = p.send(message{Event: &history.Event{
			Time: time.Now(), Kind: history.KindDecision, Op: d.Op, Key: d.Key,
			Token: d.Fence.Token, Seq: d.Fence.Seq, Seen: d.Seen.Token, SeenSeq: d.Seen.Seq,
			Accepted: d.Accepted, Enforced: d.Enforced, Value: string(d.Value),
		}})
	})
	return server.Serve(ctx, listener, store, server.Options{
		RequestTimeout: 24 * time.Hour, // hazards may hold requests in the network
		Handler:        resource.HandlerOptions{Unfenced: spec.Fencing == history.FencingOff},
	})
}

func resourceStore(ctx context.Context, spec *childSpec, own OpenStore) (resource.Store, error) {
	if spec.Store == memory.Name {
		return resource.NewMemory(), nil
	}
	s, err := openOwn(ctx, own, StoreSpec{Store: spec.Store, Dir: spec.Dir})
	if err == nil && spec.Fencing == history.FencingOff {
		if _, err = overwriter(spec.Store, s); err != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return s, err
}
