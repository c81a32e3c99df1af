// Package server runs a resource: its HTTP interface, metrics and health check on one listener.
package server

import (
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

// Limits that keep a slow or stuck client from holding a connection for ever.
const (
	headerTimeout   = 10 * time.Second // from accepting a connection to the end of the request's header
	requestTimeout  = 30 * time.Second // for the whole request, and as much again for its answer
	idleTimeout     = 2 * time.Minute  // between requests
	maxHeaderBytes  = 16 << 10
	healthTimeout   = 2 * time.Second
	shutdownTimeout = 10 * time.Second
)

// Options are the settings of [Serve].
type Options struct {
	// Handler are the handler's settings. Serve sets Registerer and Logger.
	Handler resource.HandlerOptions
	// TLS has the certificate to serve with; nil: plain HTTP.
	TLS *tls.Config
	// Logger is told what an operator wants to know; nil: nobody is.
	Logger *slog.Logger
}

// Serve serves store on ln until ctx ends: /r/ as [resource.NewHandler] says, /metrics for Prometheus, and /healthz, which
// asks the store. The last two need no bearer token. When ctx ends, requests in flight finish within 10 s.
// Serve closes ln and store.
func Serve(ctx context.Context, ln net.Listener, store resource.Store, opts Options) (err error) {
	defer func() { err = errors.Join(err, store.Close()) }()
	log := opts.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	opts.Handler.Registerer, opts.Handler.Logger = reg, log
	handler, err := resource.NewHandler(store, &opts.Handler)
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	metrics := promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg})

	srv := &http.Server{
		TLSConfig: opts.TLS,
		// Not a ServeMux, which would redirect keys with "//" or ".." in them.
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/metrics":
				metrics.ServeHTTP(w, r)
			case "/healthz":
				health(w, r, store)
			default:
				handler.ServeHTTP(w, r)
			}
		}),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      2 * requestTimeout, // counts from the end of the header, so it includes reading the body
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() {
		if opts.TLS != nil {
			served <- srv.ServeTLS(ln, "", "")
		} else {
			served <- srv.Serve(ln)
		}
	}()
	select {
	case err := <-served:
		return errors.Join(fmt.Errorf("server: %w", err), srv.Close())
	case <-ctx.Done():
	}
	log.Info("shutting down", "cause", context.Cause(ctx))
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	err = srv.Shutdown(grace)
	if err != nil {
		err = fmt.Errorf("server: requests did not finish within %v: %w", shutdownTimeout, errors.Join(err, srv.Close()))
	}
	<-served // Serve has returned: http.ErrServerClosed
	return err
}

// health answers whether the store answers.
func health(w http.ResponseWriter, r *http.Request, store resource.Store) {
	ctx, cancel := context.WithTimeout(r.Context(), healthTimeout)
	defer cancel()
	if _, err := store.Read(ctx, "healthz"); err != nil && !errors.Is(err, resource.ErrNotFound) {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	_, _ = w.Write([]byte("ok\n")) // a client that is gone gets nothing
}
