package testbed

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
)

// request sends req over its own connection.
func request(req *http.Request) (*http.Response, []byte, error) {
	addr := req.URL.Host
	if req.URL.Port() == "" {
		addr = net.JoinHostPort(req.URL.Hostname(), req.URL.Scheme)
	}
	// A transport that dials by itself continues after the context has ended.
	conn, err := new(net.Dialer).DialContext(req.Context(), "tcp", addr)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = conn.Close() }()
	once := &http.Transport{
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return conn, nil },
		DisableKeepAlives: true,
	}
	resp, err := (&http.Client{Transport: once}).Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp, body, err
}

func requestJSON(ctx context.Context, method, addr, path string, answer any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, strings.NewReader("{}"))
	if err != nil {
		return err
	}
	resp, body, err := request(req) //nolint:bodyclose // request has read and closed it
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, answer); err != nil {
		return fmt.Errorf("%s: %s: %w", path, resp.Status, err)
	}
	return nil
}
