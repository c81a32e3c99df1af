package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// What the servers of Amazon's protocols have in common.

// The credentials of servers that are started here.
const (
	awsID     = "id"
	awsSecret = "secret"
	awsRegion = "us-east-1"
)

// withCredentials is the URL of the service at addr, with credentials for those who sign.
func withCredentials(addr string) string {
	return (&url.URL{Scheme: "http", User: url.UserPassword(awsID, awsSecret), Host: addr}).String()
}

// awsConfig is a client of the service at a URL that asks once, by a connection of its own.
func awsConfig(u *url.URL) aws.Config {
	secret, _ := u.User.Password()
	at := &url.URL{Scheme: u.Scheme, Host: u.Host}
	return aws.Config{
		Region:       cmp.Or(os.Getenv("AWS_REGION"), awsRegion),
		BaseEndpoint: aws.String(at.String()),
		Credentials:  credentials.NewStaticCredentialsProvider(u.User.Username(), secret, os.Getenv("AWS_SESSION_TOKEN")),
		HTTPClient:   &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		Retryer:      func() aws.Retryer { return aws.NopRetryer{} },
	}
}

// awsServer is what a service that has answered with err calls itself, which is its version for want of a better one.
// refusal says whether err is an answer that only a service of the right kind gives.
func awsServer(resp any, err error, refusal func(error) bool) (string, error) {
	if err != nil && !refusal(err) {
		return "", err
	}
	r, ok := resp.(*smithyhttp.Response)
	if failed, isResponse := errors.AsType[*smithyhttp.ResponseError](err); isResponse {
		r, ok = failed.Response, true
	}
	if !ok {
		return "", errors.New("the answer is none of HTTP's")
	}
	return cmp.Or(r.Header.Get("Server"), "of unknown version"), nil
}

// findExternalAWS takes a list of host:port or of URLs, with credentials, or else those of the environment.
func findExternalAWS(ctx context.Context, k *kind, set string, ready func(ctx context.Context, u *url.URL) (string, error)) ([]*Server, error) {
	var found []*Server
	for text := range strings.SplitSeq(set, ",") {
		if !strings.Contains(text, "://") {
			text = "http://" + text
		}
		// Errors of a parser may quote the URL, and with it a secret.
		u, err := url.Parse(text)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
			return nil, fmt.Errorf("%s is neither host:port nor an http:// or https:// URL of a service", k.envAddr())
		}
		u.Path = ""
		if u.User == nil {
			u.User = url.UserPassword(cmp.Or(os.Getenv("AWS_ACCESS_KEY_ID"), awsID), cmp.Or(os.Getenv("AWS_SECRET_ACCESS_KEY"), awsSecret))
		}
		version, err := ready(ctx, u)
		if err != nil {
			return nil, fmt.Errorf("the server at %s (%s) does not answer: %w", u.Host, k.envAddr(), err)
		}
		addr := u.Host
		if u.Port() == "" {
			addr += map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
		}
		found = append(found, &Server{Addr: addr, URL: u.String(), Version: version})
	}
	return found, nil
}
