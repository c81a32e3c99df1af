// Package server serves a resource over HTTP, with metrics and a health check.
package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fencelab/fencelab/resource"
)

// Limits for slow or stuck clients.
const (
	requestTimeout  = 30 * time.Second // for a request, a third of it for its header; as much again for the reply
	idleTimeout     = 2 * time.Minute
	maxHeaderBytes  = 16 << 10
	healthTimeout   = 5 * time.Second
	shutdownTimeout = 10 * time.Second
)

// Options configure [Serve].
type Options struct {
	// Serve sets Registerer and Logger.
	Handler resource.HandlerOptions
	// How long a client may take to send a request; 0: 30 s.
	RequestTimeout time.Duration
	// nil: plain HTTP.
	TLS *tls.Config
	// nil: no logs.
	Logger *slog.Logger
}

// Serve serves store on ln until ctx ends: /r/ by [resource.NewHandler], /metrics for Prometheus, and /healthz, which reads from
// the store. The last two need no bearer token, so they reveal no details. Requests in flight have 10 s to finish. Serve closes
// ln and store.
func Serve(ctx context.Context, ln net.Listener, store resource.Store, opts Options) (err error) {
	defer func() { err = errors.Join(err, store.Close()) }()
	reg := prometheus.NewRegistry()
	opts.Handler.Registerer, opts.Handler.Logger = reg, opts.Logger
	handler, err := resource.NewHandler(store, &opts.Handler)
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	health := func(ctx context.Context) error {
		_, err := store.Read(ctx, "healthz")
		if errors.Is(err, resource.ErrNotFound) {
			return nil
		}
		return err
	}
	return run(ctx, ln, opts, mux(reg, health, handler, opts.Logger))
}

// StartMetrics serves only /metrics and /healthz on ln until stop, which closes ln. health returns an error if the command can't
// work.
func StartMetrics(ctx context.Context, ln net.Listener, reg *prometheus.Registry, health func(context.Context) error, log *slog.Logger) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- run(ctx, ln, Options{}, mux(reg, health, http.NotFoundHandler(), log)) }()
	return func() error {
		cancel()
		return <-served
	}
}

// mux serves /metrics, /healthz and the rest. An http.ServeMux would redirect keys with "//" or "..".
func mux(reg *prometheus.Registry, health func(context.Context) error, rest http.Handler, log *slog.Logger) http.Handler {
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	metrics := promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics":
			metrics.ServeHTTP(w, r)
		case "/healthz":
			healthz(w, r, health, cmp.Or(log, slog.New(slog.DiscardHandler)))
		default:
			rest.ServeHTTP(w, r)
		}
	})
}

func run(ctx context.Context, ln net.Listener, opts Options, h http.Handler) error {
	log := cmp.Or(opts.Logger, slog.New(slog.DiscardHandler))
	timeout := cmp.Or(opts.RequestTimeout, requestTimeout)
	srv := &http.Server{
		Handler:           h,
		TLSConfig:         opts.TLS,
		ReadHeaderTimeout: timeout / 3,
		ReadTimeout:       timeout,
		WriteTimeout:      2 * timeout, // from the end of the header, so with the body
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() {
		if opts.TLS != nil {
			served <- srv.ServeTLS(ln, "", "")
			return
		}
		served <- srv.Serve(ln)
	}()
	select {
	case err := <-served:
		return errors.Join(fmt.Errorf("server: %w", err), srv.Close())
	case <-ctx.Done():
	}
	log.Info("shutting down", "cause", context.Cause(ctx))
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	err := srv.Shutdown(grace)
	if err != nil {
		err = fmt.Errorf("server: requests did not finish within %v: %w", shutdownTimeout, errors.Join(err, srv.Close()))
	}
	if serr := <-served; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, fmt.Errorf("server: %w", serr))
	}
	return err
}

func healthz(w http.ResponseWriter, r *http.Request, health func(context.Context) error, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(r.Context(), healthTimeout)
	defer cancel()
	if err := health(ctx); err != nil {
		log.ErrorContext(ctx, "unhealthy", "error", err) // not to the client: the error may name files and addresses
		http.Error(w, "unhealthy: the log says why", http.StatusServiceUnavailable)
		return
	}
	_, _ = w.Write([]byte("ok\n"))
}
